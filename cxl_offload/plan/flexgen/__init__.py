"""Plans for FlexGen: its cost model with tiers, the search, and what is printed."""
