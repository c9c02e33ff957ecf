"""A model as data: its files by content, its limits, its precision, and what a worker serves of it.

No module here needs an engine or a device.
"""
