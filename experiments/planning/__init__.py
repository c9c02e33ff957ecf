"""How many workers of which kind a load needs: the simulator searches, and bounds cut the search.

A *question* is a case, the kinds of workers that can be had, and the share of requests that is to be answered inside its
SLO. A *size* is a number of workers of each kind. Whether a size meets the target is *tried*: the case is simulated,
under the scheduler that serves, with one seed after the other, until the interval of the share leaves the target out
(`trials`). Sizes that no schedule could meet it with are not tried: `experiments.bounds` says so from the arrivals. Nor
are those that have more of each kind than one that meets it, or fewer than one that misses it (`search`).

What limits is asked of the simulator, too: one worker is taken away, and what is missed is simulated again without the
need for pages, without the time that loads take, without that of links, and of the controller (`limits`). How
busy each part is says little, since the scheduler fills a device's spare time with smaller batches.
"""

from experiments.planning.plan import WorkerPlan, plan
from experiments.planning.question import Question, Size, busiest

__all__ = ["Question", "Size", "WorkerPlan", "busiest", "plan"]
