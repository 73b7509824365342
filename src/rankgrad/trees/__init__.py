"""Boosted trees of LightGBM, XGBoost and CatBoost, fitted on the same lists as our models.

fit     a `TreeConfig` and the splits of a dataset -> the best of a small grid of settings, ready to score

`rankgrad.runs.trees` writes the result as a run folder.
"""
