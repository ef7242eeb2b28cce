import json, sys
from benchmarks.measure import compare, NotRun
from benchmarks.rows import ROWS
from benchmarks.stack import Sizes, running
if __name__ == "__main__":
    names = sys.argv[2:] or list(ROWS)
    with running(sys.argv[1], Sizes()) as stack:
        for n in names:
            try:
                with ROWS[n](stack) as t:
                    print(json.dumps({"name": n, **compare(t, 5), "server": stack.kind}), flush=True)
            except NotRun as e: print(n, e, file=sys.stderr)
