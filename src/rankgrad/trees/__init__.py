"""Boosted trees of LightGBM, XGBoost and CatBoost, fitted on the same lists as our models.

objectives  a loss of ours as the objective of LightGBM and XGBoost
settings    what may be chosen of each library: small grids, random draws
fit         settings and lists -> trees, ready to score and to save

`rankgrad.runs.trees` writes trees as run folders and opens them.
"""

from rankgrad.trees.objectives import objective

__all__ = ["objective"]
