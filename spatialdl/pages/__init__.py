"""HTML pages: shared templates, writing, figures."""
