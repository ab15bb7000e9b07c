"""Drawing of animations, for the gallery.

Matplotlib asks for a drawing after each frame, as a window would need it, and then draws the frame
again to save it. No window is open here, so each frame is drawn once.
"""

from matplotlib.backends.backend_agg import FigureCanvasAgg


def draw_frames_once(gallery_conf, fname):
    """Ignore drawings that are asked for but not saved; sphinx-gallery calls this for each page."""
    FigureCanvasAgg.draw_idle = lambda self, *args, **kwargs: None
