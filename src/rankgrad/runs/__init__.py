"""Run folders: training into one, opening one, comparing several. The only writer and the only reader of them."""
