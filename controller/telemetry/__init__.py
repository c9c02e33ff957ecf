"""Telemetry: a row for each request and each action.

tables         the tables in memory
files          the tables on disk
writer         the process that writes them
past_requests  recent refusals, for reports on a request
"""
