"""Tables with named columns to a dataset: arrow (files and frames as Arrow tables), reader."""
