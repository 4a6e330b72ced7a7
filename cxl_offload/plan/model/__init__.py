"""What is known of a model, from its configuration."""
