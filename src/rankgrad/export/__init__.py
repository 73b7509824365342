"""Rankers for other programs: what is scored (graph, with the scaling), the formats (onnx, program, solr), whether they agree (check).

`export_ranker` is the door. A file appears only after it has been run on lists made to be difficult, and scored them as the ranker does.
"""

from rankgrad.export.write import FORMATS as FORMATS, export_ranker as export_ranker, read_export as read_export
