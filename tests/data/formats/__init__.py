"""Files of records as other tools document them, and what TRL makes of its own."""
