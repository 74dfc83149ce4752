"""Files written atomically, locks, and strict readers of JSON, for all rooms."""
