"""Boosted trees of LightGBM, XGBoost and CatBoost, trained and judged on the same lists as our models."""
