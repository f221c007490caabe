"""A tiny model that learns to read digits, beside the stock one."""
