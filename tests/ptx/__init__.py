"""An executor of PTX text: the compiled kernels run on a CPU, with the checks of a sanitizer."""
