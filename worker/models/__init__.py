"""What one model is: its files by content, its limits, its precision, and what is served of it.

Everything here is plain data and files. No module needs an engine or a device.
"""
