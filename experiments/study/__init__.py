"""The paper's figures, each one command: `python -m experiments fig5`, or `make fig5`.

Every figure leaves three things in `experiments/results/`: `figN.json` (the numbers, ours and the
paper's), `figN.csv` (what is drawn) and `figN.png` (to hold beside the paper's). A figure is a function
of its `Setting`: the same seed gives the same CSV and the same picture, bit for bit. Numbers whose key
begins with `paper_` are the paper's, as its text states them; all others are computed here.

Devices are modelled on the paper's Table 1, so the policies meet on equal terms; what differs from the
paper's testbed is named beside each number that it moves.
"""
