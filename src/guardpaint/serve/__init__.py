"""Serve guarded generation to a team: an HTTP API, a page, metrics. `pip install 'guardpaint[serve]'`."""
