"""Search for the layout to train on: `search` ranks the layouts that memo can run and that fit, by predicted speed.

Pure functions of a `Question` (`ask` reads one); nothing here imports torch.

Known error: the errors of `memo.estimate.memory_account` (docs/memory.md) and of `memo.simulate`
(benchmarks/simulator_accuracy.py). Among the layouts measured in the 4D paper's tables 3 and 4, the first choice was
within 5 % of the best in ten columns of eleven. In the eleventh column the best is 6 % faster, and the search calls it
unsure.
"""

from memo.search.plan import Choice, Plan, Refusal
from memo.search.question import Question, ask
from memo.search.ranking import search

__all__ = ["Choice", "Plan", "Question", "Refusal", "ask", "search"]
