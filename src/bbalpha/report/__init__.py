"""One HTML page of a fitted model, or of the reproduced paper: opens from disk, needs no network and no script.

write_report(model_report(TableModel.load("model")), "report.html")
write_report(paper_report(Path("results")), "paper.html")
"""

from bbalpha.report.model import model_report
from bbalpha.report.page import write_report
from bbalpha.report.paper import paper_report

__all__ = ["model_report", "paper_report", "write_report"]
