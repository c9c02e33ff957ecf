"""Stages of the port that make several requests of one, or keep something between requests.

`sequences` runs steps one after the other and keeps their state; `pipelines` asks several models under one deadline.
Neither knows the other. Applications are a stage as well, and have a room of their own (`controller.selection`).
"""
