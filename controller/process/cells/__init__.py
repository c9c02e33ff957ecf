"""The directory of cells: a controller writes its row there, and readers follow all rows (`controller.front.cells`).

publisher   writes a controller's row and its models
reader      reads all rows, ten times a second
"""
