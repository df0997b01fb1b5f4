// errors.hpp - turns a status of idist into an exception of torch
#ifndef EXAMPLES_TORCH_ERRORS_HPP
#define EXAMPLES_TORCH_ERRORS_HPP

#include "idist.h"

#include <c10/util/Exception.h>

#include <string>

namespace idist_torch {

// Throws the exception that torch has for this kind of failure, with the text of idist. Python sees
// ValueError, NotImplementedError, or torch.distributed.DistBackendError.
inline void check(idist_status status) {
    if (status == IDIST_OK) return;
    // Programs look for the word timeout.
    const char *prefix = status == IDIST_ERR_TIMEOUT ? "idist: timeout in " : "idist: ";
    std::string text = std::string(prefix) + idist_last_error();

    switch (status) {
    case IDIST_ERR_ARG: C10_THROW_ERROR(ValueError, text);
    case IDIST_ERR_UNSUPPORTED: C10_THROW_ERROR(NotImplementedError, text);
    default: C10_THROW_ERROR(DistBackendError, text);
    }
}

} // namespace idist_torch

#endif // EXAMPLES_TORCH_ERRORS_HPP
