#!/usr/bin/env python3
"""Takes a GPU from others: its memory, or its time. Needs nothing but the driver.

    hog.py memory GPU LEAVE_MIB    holds all memory but so much
    hog.py eat GPU LEAVE_MIB       the same, and takes what others free
    hog.py busy GPU                keeps all multiprocessors busy with kernels of some milliseconds

Writes `holding` when it has what it wants, and goes on until it is killed.
"""

import ctypes
import sys
import time

# Spins for so many cycles.
SPIN = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
    .reg .u64 %now, %begin, %limit, %gone;
    .reg .pred %more;
    ld.param.u64 %limit, [cycles];
    mov.u64 %begin, %clock64;
again:
    mov.u64 %now, %clock64;
    sub.u64 %gone, %now, %begin;
    setp.lt.u64 %more, %gone, %limit;
    @%more bra again;
    ret;
}
"""
MIB = 1 << 20


class Driver:
    def __init__(self, gpu):
        self.library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), gpu)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            sys.exit(f"{name}: error {status}")

    def free(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def take(self, leave):
        """Allocates until less than `leave` bytes are free, in pieces that get smaller."""
        piece = 1 << 34
        while piece >= 2 * MIB:
            address = ctypes.c_uint64()
            if self.free() < leave + piece:
                piece //= 2
            elif self.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(piece)) != 0:
                piece //= 2

    def spin(self):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(SPIN))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
        cycles = ctypes.c_uint64(4_000_000)
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(cycles), ctypes.c_void_p))
        print("holding", flush=True)
        while True:
            # More blocks than fit at once.
            for _ in range(8):
                self.call("cuLaunchKernel", function, 4096, 1, 1, 256, 1, 1, 0, None, arguments, None)
            self.call("cuCtxSynchronize")


def main():
    what, gpu = sys.argv[1], int(sys.argv[2])
    driver = Driver(gpu)
    if what == "busy":
        driver.spin()
    leave = int(sys.argv[3]) * MIB
    driver.take(leave)
    print("holding", flush=True)
    while True:
        time.sleep(0.002)
        if what == "eat":
            driver.take(leave)


if __name__ == "__main__":
    main()
