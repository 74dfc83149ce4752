"""Networks run without data, or beside one process: what a layout would refuse, or get wrong."""
