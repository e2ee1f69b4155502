"""Is a network faster and more accurate on a BPU by fxquant than by the vendor's own quantization?   python -m benchmarks.board

networks    the float networks, with images to calibrate and to test on
measure     both ways of one network, and the row that compares them
"""
