#pragma once

/// FOLIO_API marks what the shared library exports; everything else has hidden visibility.
#if defined(__GNUC__) || defined(__clang__)
#define FOLIO_API __attribute__((visibility("default")))
#else
#define FOLIO_API
#endif

/// Functions that the device scheduler runs too: constexpr on the host, __host__ __device__ under nvcc.
#if defined(__CUDACC__)
#define FOLIO_HOST_DEVICE __host__ __device__
#else
#define FOLIO_HOST_DEVICE
#endif
