"""Tables that the packages lack: names of currencies and languages, and which of their facts are disputed or out of date.

Read by `countries` and `elements`. A code without a name here leaves its fact out of the corpus; so do withdrawn currencies.
"""

from __future__ import annotations

from collections.abc import Iterator


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Code and name of each of `text`'s entries, which commas separate."""
    for entry in text.split(","):
        code, name = entry.split(" ", 1)
        yield code, name


def _codes(text: str) -> frozenset[str]:
    return frozenset(text.split())


CURRENCIES: dict[str, tuple[str, ...]] = {
    code: tuple(names.split("/"))
    for code, names in _entries(
        "AED UAE dirham/United Arab Emirates dirham,AFN Afghan afghani/afghani,ALL Albanian lek/lek,AMD Armenian dram/dram,"
        "AOA Angolan kwanza/kwanza,ARS Argentine peso,AUD Australian dollar,AWG Aruban florin,AZN Azerbaijani manat,"
        "BAM convertible mark/Bosnia and Herzegovina convertible mark,BBD Barbados dollar/Barbadian dollar,"
        "BDT Bangladeshi taka/taka,BHD Bahraini dinar,BIF Burundian franc,BMD Bermudian dollar,BND Brunei dollar,"
        "BOB Bolivian boliviano/boliviano,BRL Brazilian real/real,BSD Bahamian dollar,BTN Bhutanese ngultrum/ngultrum,"
        "BWP Botswana pula/pula,BZD Belize dollar,CAD Canadian dollar,CDF Congolese franc,CHF Swiss franc,CLP Chilean peso,"
        "CNY renminbi/yuan/Chinese yuan,COP Colombian peso,CRC Costa Rican colón/colón,CUP Cuban peso,CVE Cape Verdean escudo,"
        "CZK Czech koruna/koruna,DJF Djiboutian franc,DKK Danish krone,DOP Dominican peso,DZD Algerian dinar,"
        "EGP Egyptian pound,ERN Eritrean nakfa/nakfa,ETB Ethiopian birr/birr,EUR euro,FJD Fijian dollar/Fiji dollar,"
        "FKP Falkland Islands pound,GBP pound sterling/British pound,GEL Georgian lari/lari,GHS Ghanaian cedi/Ghana cedi/cedi,"
        "GIP Gibraltar pound,GMD Gambian dalasi/dalasi,GNF Guinean franc,GTQ Guatemalan quetzal/quetzal,"
        "GYD Guyanese dollar/Guyana dollar,HKD Hong Kong dollar,HNL Honduran lempira/lempira,HTG Haitian gourde/gourde,"
        "HUF Hungarian forint/forint,IDR Indonesian rupiah/rupiah,ILS Israeli new shekel/shekel,INR Indian rupee,"
        "IQD Iraqi dinar,IRR Iranian rial,ISK Icelandic króna,JMD Jamaican dollar,JOD Jordanian dinar,JPY Japanese yen/yen,"
        "KES Kenyan shilling,KGS Kyrgyzstani som,KHR Cambodian riel/riel,KMF Comorian franc,KPW North Korean won,"
        "KRW South Korean won,KWD Kuwaiti dinar,KYD Cayman Islands dollar,KZT Kazakhstani tenge/tenge,LAK Lao kip/kip,"
        "LBP Lebanese pound,LKR Sri Lankan rupee,LRD Liberian dollar,LSL Lesotho loti/loti,LYD Libyan dinar,"
        "MAD Moroccan dirham,MDL Moldovan leu,MGA Malagasy ariary/ariary,MKD Macedonian denar/denar,MMK Myanmar kyat/kyat,"
        "MNT Mongolian tögrög/tögrög/tugrik,MOP Macanese pataca/pataca,MUR Mauritian rupee,MVR Maldivian rufiyaa/rufiyaa,"
        "MWK Malawian kwacha,MXN Mexican peso,MYR Malaysian ringgit/ringgit,MZN Mozambican metical/metical,NAD Namibian dollar,"
        "NGN Nigerian naira/naira,NIO Nicaraguan córdoba/córdoba,NOK Norwegian krone,NPR Nepalese rupee,NZD New Zealand dollar,"
        "OMR Omani rial,PAB Panamanian balboa/balboa,PEN Peruvian sol/sol,PGK Papua New Guinean kina/kina,PHP Philippine peso,"
        "PKR Pakistani rupee,PLN Polish złoty/złoty,PYG Paraguayan guaraní/guaraní,QAR Qatari riyal,RON Romanian leu,"
        "RSD Serbian dinar,RUB Russian ruble/Russian rouble,RWF Rwandan franc,SAR Saudi riyal,SBD Solomon Islands dollar,"
        "SCR Seychellois rupee/Seychelles rupee,SDG Sudanese pound,SEK Swedish krona,SGD Singapore dollar,"
        "SHP Saint Helena pound,SOS Somali shilling,SRD Surinamese dollar/Surinam dollar,SSP South Sudanese pound,"
        "SYP Syrian pound,SZL Swazi lilangeni/lilangeni,THB Thai baht/baht,TJS Tajikistani somoni/somoni,"
        "TMT Turkmenistan manat/Turkmen manat,TND Tunisian dinar,TOP Tongan paʻanga/paʻanga,TRY Turkish lira,"
        "TTD Trinidad and Tobago dollar,TWD New Taiwan dollar,TZS Tanzanian shilling,UAH Ukrainian hryvnia/hryvnia,"
        "UGX Ugandan shilling,USD US dollar/United States dollar,UYU Uruguayan peso,UZS Uzbekistani som,"
        "VND Vietnamese đồng/đồng,VUV Vanuatu vatu/vatu,WST Samoan tālā/tālā,XAF Central African CFA franc/CFA franc,"
        "XCD East Caribbean dollar,XOF West African CFA franc/CFA franc,XPF CFP franc,YER Yemeni rial,"
        "ZAR South African rand/rand"
    )
}
"""ISO 4217 code -> what the currency is called. Withdrawn codes, and the Bulgarian lev that the euro replaced, have none."""

FUNDS = frozenset({"BOV", "CHE", "CHW", "CLF", "USN", "USS", "UYI", "CUC", "SVC"})
"""Units of account and withdrawn twins of a currency: nobody pays with them."""

LANGUAGES: dict[str, str] = dict(
    _entries(
        "af Afrikaans,am Amharic,ar Arabic,ay Aymara,az Azerbaijani,be Belarusian,bg Bulgarian,bi Bislama,bn Bengali,"
        "bs Bosnian,ca Catalan,ch Chamorro,cnr Montenegrin,cs Czech,da Danish,de German,dv Dhivehi,dz Dzongkha,el Greek,"
        "en English,es Spanish,et Estonian,fa Persian,fi Finnish,fj Fijian,fo Faroese,fr French,ga Irish,gn Guaraní,gv Manx,"
        "he Hebrew,hi Hindi,hr Croatian,ht Haitian Creole,hu Hungarian,hy Armenian,id Indonesian,is Icelandic,it Italian,"
        "ja Japanese,ka Georgian,kk Kazakh,kl Greenlandic,km Khmer,ko Korean,ku Kurdish,ky Kyrgyz,lb Luxembourgish,lo Lao,"
        "lt Lithuanian,lv Latvian,mg Malagasy,mh Marshallese,mi Māori,mk Macedonian,mn Mongolian,ms Malay,mt Maltese,"
        "my Burmese,na Nauruan,ne Nepali,nl Dutch,no Norwegian,ny Chewa,pl Polish,ps Pashto,pt Portuguese,qu Quechua,"
        "rn Kirundi,ro Romanian,ru Russian,rw Kinyarwanda,sg Sango,si Sinhala,sk Slovak,sl Slovene,sm Samoan,sn Shona,"
        "so Somali,sq Albanian,sr Serbian,ss Swazi,st Sotho,sv Swedish,sw Swahili,ta Tamil,tg Tajik,th Thai,ti Tigrinya,"
        "tk Turkmen,tn Tswana,to Tongan,tr Turkish,ts Tsonga,uk Ukrainian,ur Urdu,uz Uzbek,ve Venda,vi Vietnamese,xh Xhosa,"
        "zh Chinese,zu Zulu"
    )
)
"""ISO 639 code -> the language's name."""

TERRITORIES = _codes(
    "AI AS AW AX BL BM BQ CC CK CW CX FK FO GF GG GI GL GP GS GU HK IM IO "
    "JE KY MF MO MP MQ MS NC NF NU PF PM PN PR RE SH SJ SX TC TF TK VG VI WF YT"
)
"""What ISO 3166 lists and is no state: it has a passage, and no question calls it a country."""

LEFT_OUT = _codes("AN AQ BV CS EH HM PS UM")
"""Dissolved, uninhabited or disputed: no passage."""

DISSOLVED = frozenset({"AN", "CS"})
"""Of those, the ones whose borders count no more."""

UNSETTLED: dict[str, frozenset[str]] = {
    "borders": frozenset({"LK"}),
    "capital": _codes("BI BJ BO CH CI CL CY EG GQ HK ID IL KZ LK ME MO MS MY NL NR PW SZ TK TZ VA YE ZA"),
    "currency": _codes("CU LR SV ZW"),
    "language": _codes(
        "AF AM AR AZ BF BI BO BZ CH CK CY CZ DZ ET FJ FO GG GQ GU IL JE KI KM LB MA MK ML MP MU MX NA NE NF NL NU PE PG PH PN "
        "PW RS RW SC SZ TJ TK TL TM TV UZ ZM"
    ),
}
"""Countries of which a fact is contested, divided, wrong or changed since: a border at sea, several capitals or a
moved seat, a list of languages that lacks an official one or has one that isn't."""

CORRECTED: dict[str, dict[str, str | int]] = {
    "IE": {"population": 4_609_600},
    "ME": {"subregion": "Southern Europe"},
    "RS": {"area": 77_474, "subregion": "Southern Europe"},
}
"""What the package has from another place, as it is: Serbia's area is Slovakia's there, Ireland's population its island's;
the region of Montenegro and Serbia isn't that of the United Nations' list (M49), which the others' is."""

RENAMED = {"BS": "Bahamas", "FM": "Micronesia", "GM": "Gambia", "MK": "North Macedonia", "SZ": "Eswatini", "VA": "Vatican City"}
"""The names that the corpus uses, where the package's is another."""

OTHER_NAMES = {
    "BN": ("Brunei Darussalam",),
    "FM": ("Federated States of Micronesia",),
    "GB": ("UK", "Great Britain"),
    "AE": ("UAE",),
    "US": ("USA", "United States of America", "America"),
    "MM": ("Burma",),
    "TR": ("Türkiye",),
    "VA": ("Holy See", "Vatican"),
    "CZ": ("Czechia",),
    "MK": ("Republic of North Macedonia", "Macedonia"),
    "SZ": ("Kingdom of Eswatini", "Swaziland"),
}
"""Accepted besides what the package lists."""

PLACES = {"England": "United Kingdom", "Scotland": "United Kingdom", "Great Britain": "United Kingdom"}
"""Where an element was discovered, if that is a part of a country -> the country."""

DOUBTFUL_DISCOVERIES = _codes("Am Bh Cd Co Db Fr Ho Lr Lu Lv Nb Nd Nh No Os Pr Pt Rf Rn Se V Y")
"""Elements whose discovery is contested, or misdated or misspelt in the package: it is left out."""

PREDICTED_MELTING = _codes("At Fr")
"""Elements of which too little was ever there to melt; besides those from number 96 on."""

OTHER_ELEMENT_NAMES = {"Al": ("Aluminium",), "Cs": ("Caesium",), "S": ("Sulphur",)}
