"""The paper's tables and figures made again: `rankgrad reproduce`.

paper    Table 1 and the figures, which need no data
rows     what is trained: a line for every row of Table 2, of the ablations and of DASALC's ingredients
data     the lists of each fold, read once and scaled once
trials   every row on every fold with every seed, each an ordinary run folder
claims   means, p-values, and which claims of the paper hold
tables   Table 2, the ablations and the ingredients, as JSON, text and Markdown
"""
