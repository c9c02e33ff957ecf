"""Admission at the front: what is rejected before it is parsed.

limits        how many calls and bytes may be open at once
entrance      which requests a busy event loop begins, has wait, and refuses; no I/O
memory        how much memory this process takes and may take
pressure      what is rejected when memory gets short; no I/O
early_quotas  what a front rejects for the controller's quotas; no I/O
"""
