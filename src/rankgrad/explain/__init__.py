"""What a ranking rests on: which features the metric would miss, and why one document stands above another.

groups        which features say the same within lists
importance    what the metric loses where a feature is permuted
attribution   what each feature gives to the score of a document: integrated gradients
explanation   both of a run on data, as `rankgrad explain` writes them and a report shows them
"""

from rankgrad.explain.attribution import Attribution, Contribution, attributions
from rankgrad.explain.groups import correlated_groups
from rankgrad.explain.importance import Importance, feature_importances

__all__ = [
    "Attribution",
    "Contribution",
    "Importance",
    "attributions",
    "correlated_groups",
    "feature_importances",
]
