"""`python -m bitnet_inference` is `bitnet`."""

from bitnet_inference.cli import main

main()
