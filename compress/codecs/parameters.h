// Parameters that several codecs have. A parameter of one codec stands in that codec's file.
#ifndef THINWIRE_COMPRESS_CODECS_PARAMETERS_H_
#define THINWIRE_COMPRESS_CODECS_PARAMETERS_H_

#include "compress/codec_info.h"

namespace thinwire::codecs {

extern const ParameterInfo kBlock;     // of codecs of blocks
extern const ParameterInfo kRounding;  // of codecs whose CodeFor has a stochastic sibling
extern const ParameterInfo kSeed;      // of whatever draws

// Parses "0" or "1" into `flag`; for a parameter's parse function.
std::optional<std::string> ParseFlag(const std::string& value, bool* flag);

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_PARAMETERS_H_
