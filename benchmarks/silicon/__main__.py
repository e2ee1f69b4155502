"""Do the vendor's chips compute the integer graph's bits?   python -m benchmarks.silicon --operators

    --operators   every operator in a small network of its own: elements of its output in which the vendor's program differs from the
                  integer graph, with scales that were observed and with powers of two, at which sums lie on ties
    --networks    whole networks, by statistics and with learned scales; the first layer that differs is named
    --record      tests/golden/silicon, from the rows that are equal: what the suite compares without the tool

The vendor's compiler and runtime are programs that are run: FXQUANT_HORIZON names the folder of their environment. What the compiler leaves
to the processor, or refuses, is named so and not compared.
"""

import argparse
import logging

from benchmarks.silicon import networks, operators, tool, vectors
from benchmarks.silicon.table import markdown, show
from fxquant.conformance.kit import SCALES, TOGETHER
from fxquant.conformance.rows import ROWS

MARCHES = ("bayes-e", "bernoulli2", "bayes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--operators", action="store_true")
    what.add_argument("--networks", action="store_true")
    what.add_argument("--record", action="store_true")
    parser.add_argument("--target", nargs="*", default=list(MARCHES[:2]), choices=MARCHES)
    parser.add_argument(
        "--dtype", nargs="*", default=["int8"], choices=("int8", "int16"), help="of the activations; bernoulli2 has int8 alone"
    )
    parser.add_argument("--rows", nargs="*", help="operators, or networks; all by default")
    parser.add_argument("--scales", nargs="*", default=list(SCALES), choices=SCALES, help="of operators")
    parser.add_argument("--together", type=int, default=TOGETHER, help="operators of one compiled file")
    parser.add_argument("--markdown", action="store_true", help="print the table as a page")
    options = parser.parse_args()
    tool.require()
    pairs = [(march, dtype) for march in options.target for dtype in options.dtype if (march, dtype) != ("bernoulli2", "int16")]
    results = []
    if options.networks:
        measured = networks.measured(options.rows or list(networks.NETWORKS), options.target)
    else:
        rows = [ROWS[name] for name in options.rows or ROWS]
        scales = options.scales if options.operators else options.scales[:1]
        measured = (each for pair in pairs for how in scales for each in operators.measured(rows, *pair, how, options.together))
    for result in measured:
        results.append(result)
        print(
            f"{result.row}  {result.march}  {result.dtype}  {result.scales}  {result.place}  {result.differing}/{result.elements}",
            flush=True,
        )
    (print(markdown(results)) if options.markdown else show(results))
    if options.record:
        vectors.write_common()
        for march, dtype in pairs:
            equal = [ROWS[r.row] for r in results if (r.march, r.dtype) == (march, dtype) and r.equal]
            print(vectors.record(equal, march, dtype, options.scales[0]))
    raise SystemExit(any(result.place == "BPU" and result.differing for result in results))


if __name__ == "__main__":
    logging.getLogger("fxquant").setLevel(logging.ERROR)  # limits of a march that a row breaks are not the question here
    main()
