"""What every other room may use, and which imports none of them.

`files.py` writes files completely or not at all, and locks them; `fields.py` reads JSON of
strangers; `packages.py` imports optional packages; `text.py` aligns and shortens text in a
console; `pages.py` makes HTML pages that need no other file; `configuring/` knows the keys of the
configuration, their help, and what is wrong with an override.
"""
