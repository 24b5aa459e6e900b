"""Figures of a run. Functions take rows and return a Plotly figure, which HTML report and dashboard share.

    from analyzers.figures import course, loss
    from analyzers.figures.drawing import theme
    figure = loss.draw(course.loss_curve(store), marks)
    figure.update_layout(template=theme.template(dark=True))

Every module draws one figure or a family of similar ones. A figure has no template: the page that shows it adds a light
or a dark one, which can change with the reader's preference. Text that comes from a run goes through `theme.label`.
"""

from __future__ import annotations
