"""Models and the state that survives a restart.

catalogue     models, their names and ids, and what workers say of them
model_folder  a model's folder, as Triton lays it out
uploads       models that were added by upload
digests       digests of files, kept over restarts
state_file    the SQLite file of the state folder
"""
