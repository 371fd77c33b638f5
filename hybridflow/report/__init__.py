"""What a run shows after it: the summary on the console, the plot, and one HTML page.

Reads the files of a run's folder and nothing else, so it says the same at any later time.
"""

from hybridflow.report.page import write_page
from hybridflow.report.summary import conclude, read_metrics

__all__ = ["conclude", "read_metrics", "write_page"]
