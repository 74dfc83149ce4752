"""What `python -m spatialdl.check` and the tests of whole networks share."""
