"""What can only be measured on a GPU: `make gpu` (`python -m experiments.gpu`).

Its sections (`probe`, `table1`, `serve`) also run with `--device torch:cpu`, which is the same code on the
processor, so that tests can keep it whole; what that prints says nothing about a GPU.
"""
