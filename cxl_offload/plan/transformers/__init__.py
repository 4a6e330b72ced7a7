"""Plans for this package's integration with Hugging Face transformers: policies by kind."""
