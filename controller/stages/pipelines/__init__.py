"""Pipelines: several models that clients ask as one, with one deadline.

::

    config.toml, config.pbtxt --> core/declaration    stages, tensors by name, conditions
                                       |
    models as workers describe them --> core/graph     do they fit; inputs and outputs of the whole
                                       |               (`models.entry.Pipeline` keeps it)
                                       v
    request ---------------------> stage ----------> the next stage of the port: a request per model
                                       |
                                   core/run          which stage is next, how long what is behind it takes

`core` is pure. `models` reads declarations and keeps graphs, so `core` lies below it, and `stage` above.
"""
