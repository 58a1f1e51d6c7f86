"""Attacks run live against a system they can only ask, one file each; and white-box ones on the auditor itself."""
