"""What a study would do, said without loading weights and without writing anything."""

from __future__ import annotations

from forward_influence.contents import survey
from forward_influence.engine import CHUNK_SIZE
from forward_influence.errors import UserError
from forward_influence.estimate import estimate
from forward_influence.plan import Plan
from forward_influence.run_files import RUN_JSON, spec_differences
from forward_influence.runs import read_run


def rows_there(plan: Plan, fresh: bool) -> list[dict]:
    """Rows that the plan's folder holds already.

    Raises
    ------
    UserError
        If they are damaged, or those of another run, or of other documents or selectors under the same names.
    """
    if fresh or not (plan.out / RUN_JSON).exists():
        return []
    run = read_run(plan.out)
    if run.hash != plan.spec.hash():
        raise UserError(
            f"Run folder {str(plan.out)!r} holds another run "
            f"({spec_differences(run.spec.to_dict(), plan.spec.to_dict())}); give another --out, "
            "or --fresh to move the old rows aside."
        )
    plan.inputs.check(survey(run.rows, plan.out), run.code, plan.out)
    return run.rows


def describe_plan(plan: Plan, todo: list[tuple]) -> str:
    """The plan in a few lines: spec, documents, skips, and what it needs.

    Parameters
    ----------
    plan : Plan
    todo : list of (TokenizedDocument, dict of selectors)
        What is still to be measured.
    """
    spec = plan.spec
    missing = sum(len(selectors) for _, selectors in todo)
    lines = [
        f"model      {plan.source.name} ({plan.source.identity}), {plan.dtype} on {plan.device}",
        f"data       {plan.corpus['name']}: {len(plan.documents)} documents to measure, {len(plan.short)} too short",
        f"study      {spec.sentence()}",
        f"selectors  {', '.join(plan.selectors)}",
        f"rows       {missing} to measure, {len(plan.documents) * len(plan.selectors) - missing} there already",
        f"run        {plan.out} (hash {spec.hash()[:8]})",
    ]
    if spec.extend_context:
        lines.append(f"context    extended by {spec.extend_context}: beyond what the model was trained for")
    if todo:
        lines.append(estimate(plan, todo, chunk_size=CHUNK_SIZE).sentence())
    lines.append("Dry run: no weights were loaded and nothing was written.")
    return "\n".join(lines)
