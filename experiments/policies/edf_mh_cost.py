"""What the core costs per request under `edf_mh` and under `clockwork`, beside what `edf_mh` recorded."""

from __future__ import annotations

from experiments.policies.edf_mh import add_cost

if __name__ == "__main__":
    add_cost()
