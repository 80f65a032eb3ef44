/* A check that says where it failed and what the launcher's last message was, and ends the test. */
#ifndef DRMAS_EXPECT_H
#define DRMAS_EXPECT_H

#include "drmas_kernels.h"

#include <stdio.h>
#include <stdlib.h>

#define EXPECT(condition)                                                                                        \
  do {                                                                                                           \
    if (!(condition)) {                                                                                          \
      fprintf(stderr, "%s:%d: not so: %s\nlast message: %s\n", __FILE__, __LINE__, #condition, drmas_message()); \
      exit(1);                                                                                                   \
    }                                                                                                            \
  } while (0)

#endif
