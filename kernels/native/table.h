/* The kernels that a library is linked with. Between launcher.cpp and its table, not for callers. */
#ifndef DRMAS_TABLE_H
#define DRMAS_TABLE_H

#include "drmas_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const drmas_kernel drmas_table[];
extern const size_t drmas_table_count;

#ifdef __cplusplus
}
#endif

#endif
