"""Figures of a run: rows in, a Plotly figure out; the HTML report and the dashboard draw the same ones.

    from analyzers.figures import course, loss
    from analyzers.figures.drawing import theme
    figure = loss.draw(course.loss_curve(store), marks)
    figure.update_layout(template=theme.template(dark=True))

Every module draws one figure or a family. A figure holds no template: the page that shows it adds one (light or dark),
so that it can change with the reader's preference. Text that comes from a run goes through `theme.label`.
"""

from __future__ import annotations
