"""The stock models: one small adapter for each family, and what they share."""
