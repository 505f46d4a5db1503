"""Which layout to train on: `search` ranks all that memo can run by predicted speed, among those that fit.

Pure functions of a `Question` (`ask` reads one); nothing here imports torch.

Known error: that of `memo.estimate.own_memory` (docs/memory.md) and of `memo.simulate`
(benchmarks/simulator_accuracy.py). Among the layouts measured in the 4D paper's tables 3 and 4 the
first choice was within 5 % of the best in ten columns of eleven; in the other the best is 6 % faster and called unsure.
"""

from memo.search.plan import Choice, Plan, Refusal
from memo.search.question import Question, ask
from memo.search.ranking import search

__all__ = ["Choice", "Plan", "Question", "Refusal", "ask", "search"]
