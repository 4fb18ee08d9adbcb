"""A notebook's figures are drawn three times: when a cell ends, to find their edges, and at twice the resolution for a PNG. A test looks at none
of them. Here each is drawn once, as a window would draw it, without making room for labels, and no image is made of it."""

def drawn(fig, *args, **kwargs): fig.canvas.draw()  # and returns nothing to show

def draw_figures_quickly():
    "From here on, in shells that begin later"
    from IPython.core import pylabtools
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.figure import Figure
    pylabtools.print_figure = pylabtools.retina_figure = drawn
    Figure.set_layout_engine = lambda self, *args, **kwargs: None
    FigureCanvasBase.draw_idle = lambda self, *args, **kwargs: None # of a window, and there is none
