#include <cstddef>

/// libsentencepiece and libc10 each define a variable of this name: an object of 32 bytes that its constructor fills, and an int behind which libc10 keeps
/// other variables. The loader gives both the first definition that it finds, and with libc10's the object lies over its neighbors: over
/// FLAGS_caffe2_use_fatal_for_enforce, whereupon whatever libtorch would throw, running out of memory above all, ends the process by SIGABRT. Ours comes
/// before both and has room for either. Nobody reads it: libc10 only where its command line flags are parsed.
extern std::byte FLAGS_minloglevel[64];
alignas(64) __attribute__((visibility("default"), used)) std::byte FLAGS_minloglevel[64]{};
