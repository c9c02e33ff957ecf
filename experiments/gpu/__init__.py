"""What can only be measured on a GPU: `make gpu` (`python -m experiments.gpu`).

Its sections (`probe`, `table1`, `serve`, `fig2`, `fig5`, `fig6`) also run with `--device torch:cpu`, which is the same code on the
processor, so that tests can keep it whole; what that prints says nothing about a GPU.
"""
