"""What proves a finding, drawn: one function a kind (or a family of kinds), from the store and the finding alone.

    for drawing in memory.growth(store, finding):
        drawing.title, drawing.figure

`evidence` says which kind has which proof. A proof whose records are missing is left out: it gives nothing.
"""
